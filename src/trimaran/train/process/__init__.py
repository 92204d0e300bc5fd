"""A rank as a process: fork server, heartbeat, rendezvous, link to the supervisor."""
