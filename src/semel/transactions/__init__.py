"""Transactional mode: the record is written in the caller's own transaction, or not at all.

    links        what is asked of a connection; savepoints
    families     which connections there are, and who speaks to each of them
    sqlite, psycopg, asyncpg, mysql, sqlalchemy, django     one module per family
    dialects     the statements that a transaction needs beside the verbs of the store
    refusals     arguments that cannot be meant
    records      the records of an engine's store, for one of these dialects
    claiming     the steps of a block, as generators that yield statements and receive rows
    db_errors     what a driver's error means here
    inside       the attempt of a block, and the warning to who leaves it

Nothing in here commits. A block works between two savepoints: the outer one undoes the whole block,
record included; the inner one is gone if the transaction has ended meanwhile, which is how its end
is noticed on every database. Until then the record says: held, and abandoned.
"""
