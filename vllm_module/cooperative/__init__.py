"""A reader by which the ranks of one group read a checkpoint together, each byte once.

It is given the plan of a load, and by it what this rank will read, in which order. Rows that one
rank alone wants, it reads itself. Rows that several ranks want are laid out in batches, in that
order, and go through a ring of buffers: each rank reads its part of every batch, and copies what it
wants out of the buffers.

``wants.py`` has what a plan will read, and what ranks tell each other of it,
``batches.py`` the layout, ``reader.py`` the reader, ``reading.py`` how ranks open it together, and
``choice.py`` whether it is worth it. ``moving.py`` sends weights from ranks to ranks by a
plan, ``rank_transfer.py`` has the messages of one of them. With ``sent_boxes.py`` the ranks of an
engine take part.
"""

from vllm_module.cooperative.choice import chosen
from vllm_module.cooperative.moving import exchange_boxes, receive_boxes, send_boxes
from vllm_module.cooperative.reading import Cooperation
from vllm_module.cooperative.sent_boxes import SentBoxes

__all__ = [
    "Cooperation",
    "SentBoxes",
    "chosen",
    "exchange_boxes",
    "receive_boxes",
    "send_boxes",
]
