"""The Hugging Face architectures that our decoder is read from and written as, one small module for each kind."""
