"""Checkpoints in object stores and on the web, read by ranges of their files.

``place.py`` reads a URL and names files by it. A client does one request: ``obstore_client.py`` for
buckets, ``http_client.py`` (with connections of ``http_connection.py``) for web servers, and
``hub_client.py`` for the hub. ``store.py`` tries a request again and keeps many under way,
``spans.py`` decides which ranges are requested, ``stored_bytes.py`` is a file whose runs are read,
``source.py`` is the source of a model, and ``upload.py`` writes a file to a bucket.
"""
