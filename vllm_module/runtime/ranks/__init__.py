"""The processes of an engine, one for each rank, and the messages among them."""
