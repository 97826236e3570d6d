-- The plain case of an end, decided before the rest of the script is set up: the owner ends its
-- running attempt, and nobody waits for it. Whatever is not plain goes on, and is judged in full.
-- The record is as record.lua describes it.

local found = redis.call('GET', KEYS[1])
if not found then return 0 end
local version, flags, replaced = string.byte(found, 1, 3)
-- PROCESSING, with hold and a fingerprint or without, and no other flag: neither retryable, which
-- only an end can be, nor waited for.
if KEYS[2] and #found > 38 and version == 1 and replaced <= 8
  and flags % 4 == 0 and flags % 16 < 8 and flags < 32
  and tonumber(ARGV[4]) > 0 and ARGV[6] == '1' and not ARGV[7]
  and string.sub(found, 27, 38) == ARGV[1] then
  local tail = 38 + 16 * (flags >= 16 and replaced + 1 or replaced)
  if #found >= tail + 13 then
    local time = redis.call('TIME')
    local ended = flags + tonumber(ARGV[3]) + (ARGV[5] == '1' and 8 or 0)
    -- First the write that needs no memory: see write_when_full in record.lua.
    redis.call('ZREM', KEYS[2], string.sub(KEYS[1], string.find(KEYS[1], '}', 1, true) + 1))
    redis.call('SET', KEYS[1],
      string.char(1, ended) .. string.sub(found, 3, 20)
        .. struct.pack('>I6', time[1] * 1000 + math.floor(time[2] / 1000))
        .. string.sub(found, 27, tail) .. ARGV[2],
      'PX', ARGV[4])
    return 1
  end
end
