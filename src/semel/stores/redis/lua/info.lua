-- KEYS[1]: any key of the server to ask. Answers what it says of its memory and its persistence.

return redis.call('INFO', 'memory') .. redis.call('INFO', 'persistence')
