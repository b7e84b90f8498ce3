"""Operators of the user's own that remember or work on whole records.

values      what a user's state may hold, as plain values of a checkpoint
stateful    `stateful_transform`: state, push and flush
carry       operators behind one of those: their checkpoints carry the records that they hold
stateless   `add_op`: records in, records out
"""
