"""A run as one self-contained HTML page: measurements beside the prediction."""
