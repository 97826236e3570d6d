"""Stores on SQL databases: one table, one flow of verbs, one dialect module each.

verbs        what each verb does, as generators that yield statements and receive rows
dialect      what the store classes ask of a database
migrations   how a table comes to be, and grows with new versions of semel
rows, ranges how a record looks as a row, and keys as a range
mysql        MySQL and MariaDB
sqlite_*     the statements of SQLite, its connection, its errors
combining    many threads, one transaction
writing      many tasks, one writer thread, one transaction
store, aio   the store classes, thin, over any of these
"""
