-- Answers the entry, nil when there is none, and the time (us).

return {redis.call('GET', KEYS[1]), clock()}
