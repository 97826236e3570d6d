"""Transactional mode: the record is written in the caller's own transaction, or not at all.

    block       a block: what it takes, what it asks of the records, its steps, its attempt
    dialects    the records on each database
    links       what is asked of a connection; savepoints; the links that both kinds have
    drivers     which connections are taken; the links of one kind
    db_errors   what a driver's error means here

Nothing in here commits. A block works between two savepoints: the outer one undoes the whole block,
record included; the inner one is gone if the transaction has ended meanwhile, which is how its end
is noticed on every database. Until then the record says: held, and abandoned.
"""
