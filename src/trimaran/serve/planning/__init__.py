"""`trimaran plan --serve`: the cost of a server, and which layout of it is best."""
