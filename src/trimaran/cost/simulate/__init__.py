"""The same terms over time: one step event by event, and a job over weeks with failures."""
