-- KEYS[1]: any key of the server to ask. Answers what it says of its memory and its persistence.

local memory = redis.pcall('INFO', 'memory')
if type(memory) == 'table' then
    if string.find(memory.err, 'NOPERM', 1, true) or string.find(memory.err, "can't run", 1, true) then
        -- Not every server says which command of a script a user may not run.
        return redis.error_reply("NOPERM this user has no permissions to run the 'info' command")
    end
    return memory
end
return memory .. redis.call('INFO', 'persistence')
