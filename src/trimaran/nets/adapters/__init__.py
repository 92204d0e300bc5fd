"""Adapters: small trained matrices beside frozen linear layers (LoRA, DoRA)."""
