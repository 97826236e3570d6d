-- The two plain cases of a claim, decided before the rest of the script is set up: that would cost
-- the server more than the decision. Whatever is not plain goes on, and is judged in full.
-- The record is as record.lua describes it.

-- Of a long record only the beginning is judged. A script would copy all of it several times, so the
-- answer is then `large`: the client reads the record by a plain GET, and looks whether it begins in
-- the same way.
local BEGINNING = 65536
local found = redis.call('GETRANGE', KEYS[1], '0', '65535')  -- as text: numbers take longer

-- A duplicate of what ended for good: SUCCEEDED, or FAILED and not to be retried.
if #found > 38 and ARGV[6] ~= '1' then
  local version, flags, replaced = string.byte(found, 1, 3)
  local state, retryable, has_fingerprint = flags % 4, flags % 16 >= 8, flags % 32 >= 16
  if version == 1 and replaced <= 8 and (state == 1 or (state == 2 and not retryable)) then
    local outcome, same = 38 + 16 * replaced, true
    if has_fingerprint then
      outcome = outcome + 16
      same = ARGV[2] == '' or string.sub(found, 39, 54) == ARGV[2]
    end
    if same and #found > outcome then
      local left = redis.call('PTTL', KEYS[1])
      if #found == BEGINNING then return {'large', string.sub(found, 1, 38), left} end
      return {'finished', found, left}
    end
  end
end

-- A key that nobody has used.
if found == '' and KEYS[2] and ARGV[5] == '0' then
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local lease, keep = tonumber(ARGV[3]), tonumber(ARGV[4])
  local ends, millis = string.format('%.0f', now + lease), math.floor(now / 1000)
  local flags = ARGV[2] == '' and 0 or 16
  local written = redis.call('SET', KEYS[1],
    struct.pack('>BBBI4I7I6I6', 1, flags, 0, 1, now, millis, millis) .. ARGV[1] .. ARGV[2]
      .. struct.pack('>I7I6', now + lease, keep) .. ARGV[8],
    'NX', 'PX', string.format('%.0f', math.max(1, keep + math.ceil(lease / 1000))))
  if written then
    redis.call('ZADD', KEYS[2], ends, string.sub(KEYS[1], string.find(KEYS[1], '}', 1, true) + 1))
    return {'claimed', 1, now, 0}
  end
end

-- To GETRANGE a key that does not exist is like an empty one, which is a damaged record.
if found == '' and redis.call('PTTL', KEYS[1]) == -2 then found = false end
-- A running attempt may be written again: then nothing of it must be lost.
if found and #found == BEGINNING and string.byte(found, 2) % 4 == 0 then
  found = redis.call('GET', KEYS[1])
end
