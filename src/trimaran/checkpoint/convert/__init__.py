"""Checkpoints in other formats: Hugging Face, DCP and PEFT."""
