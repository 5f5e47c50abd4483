"""An HTTP server with the protocols of OpenAI, and the formats of what models write."""
