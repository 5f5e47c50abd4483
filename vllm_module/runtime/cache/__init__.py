"""The KV cache's pages and recurrent states of sequences: their use and their memory."""
