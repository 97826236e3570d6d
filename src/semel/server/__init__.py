"""The service: semel for teams in every language, by five HTTP verbs. `semel serve` runs it."""
