"""The resume check: three runs, their comparison, and the cause of what differs."""
