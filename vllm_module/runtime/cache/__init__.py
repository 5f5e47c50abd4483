"""The pages and states of sequences: which are in use, and their memory."""
