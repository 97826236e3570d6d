-- Answers the entry, nil when there is none, the time (us), and the generation of the bucket.

return {redis.call('GET', KEYS[1]), clock(), generation()}
