"""Stores on SQL databases: one table, one flow of verbs, one dialect each.

verbs        what each verb does, as generators that yield statements and receive rows
batch        the members of a batch: their order, their portions, an answer for each
rows         how a record looks as a row
schema       how a table comes to be, and grows with new versions of semel
errors       what answers of a database mean, whichever it is; the deadline of a call
aio, store   what the stores of all databases share, for asyncio and for threads: executors,
             batches, pools of connections
postgres     PostgreSQL
mysql        MySQL and MariaDB
sqlite*      SQLite
"""
