"""Networks of Hugging Face models, split for every axis."""
