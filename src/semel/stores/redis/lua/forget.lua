-- Removes whatever is there, readable or not: this is also the way out of a damaged record.

index_remove()
return redis.call('DEL', KEYS[1])
