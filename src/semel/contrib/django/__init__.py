"""A Django app whose only content is the migration that makes the table of records.

Add "semel.contrib.django" to INSTALLED_APPS, then `manage.py migrate semel`.
"""
