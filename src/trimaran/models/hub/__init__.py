"""Files of the Hugging Face Hub: names, and what is fetched into the local cache before ranks start."""
