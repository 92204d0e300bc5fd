"""What commands say to people, in English and Chinese."""
