"""Starts the ranks and supervises them from outside. It shares only files, sockets and command lines with them."""
