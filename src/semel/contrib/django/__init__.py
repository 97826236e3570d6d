"""A Django app: the migration that makes the table of records, and a check of `settings.SEMEL`.

Add "semel.contrib.django" to INSTALLED_APPS, then `manage.py migrate semel` and `manage.py check`.
"""
