"""The processes of an engine, one a rank, and the messages among them."""
