-- KEYS[3]: where the client has just put the outcome, after room for the longest header
-- ARGV: owner, ttl (ms)
-- Ends an attempt that succeeded as end.lua does, by the same rules; but the outcome becomes part of
-- the record without being copied. -1: it is not there, or out of reach; then end.lua does it.

local uploaded = KEYS[3]
if not uploaded then return -1 end
local record = read()
local mine = record and record.owner == ARGV[1]
if not mine or record.state ~= PROCESSING then
  redis.call('DEL', uploaded)
  return mine and record.state == SUCCEEDED and 1 or 0  -- 1: sent twice
end
-- It goes with the key when that is renamed. And it needs no memory: see write_when_full.
if redis.call('PEXPIRE', uploaded, ARGV[2]) == 0 then return -1 end
local waited_for = record.waited_for
record.state, record.retryable, record.waited_for = SUCCEEDED, false, 0
record.updated = math.floor(clock() / 1000)
local header = pack(record, '')
local unused = HEADER + 16 * (SUPERSEDED_LIMIT + 1) - #header  -- a multiple of 16
if unused > 0 then header = header .. string.char(254, unused) .. string.rep('\0', unused - 2) end
redis.call('SETRANGE', uploaded, 0, header)
redis.call('RENAME', uploaded, KEYS[1])
index_remove()
if waited_for ~= 0 then wake() end
return 1
