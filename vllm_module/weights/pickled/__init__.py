"""Reading ``.bin`` and ``.distcp`` checkpoints, whose pickles are parsed and never run."""
