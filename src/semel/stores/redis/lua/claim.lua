-- ARGV: owner, fingerprint ('' = none), lease (us), keep (ms), hold, replace, attempts ('' = any),
--   length and run_info ('' = none)
-- Judges in the order of semel.core.judge; the first line that fits is the answer.

local owner, fingerprint = ARGV[1], ARGV[2]
local lease, keep = tonumber(ARGV[3]), tonumber(ARGV[4])
local hold, replace, attempts = ARGV[5] == '1', ARGV[6] == '1', tonumber(ARGV[7])
local now = clock()
local raw, old = found, found and parse(found)

local function finished()
  local left = redis.call('PTTL', KEYS[1])
  if #raw == BEGINNING then return {'large', string.sub(raw, 1, HEADER), left} end
  return {'finished', raw, left}
end

local function was_superseded()
  for from = 1, #old.superseded, 16 do
    if string.sub(old.superseded, from, from + 15) == fingerprint then return true end
  end
  return false
end

-- A server that takes no writes can still answer busy: then nobody is woken.
local function note_waiter()
  if KEYS[2] then redis.pcall('ZREM', KEYS[2], '') end  -- see write_when_full
  local flags = string.byte(raw, 2) + WAITED_FOR
  local noted = string.sub(raw, 1, 1) .. string.char(flags) .. string.sub(raw, 3)
  redis.pcall('SET', KEYS[1], noted, 'KEEPTTL')
end

local replacing = false
if old then
  if old.owner == owner then
    if old.state ~= PROCESSING then return finished() end
    write_when_full()
    write_running(old, lease, now)
    return {'claimed', old.number, old.fence, 0}
  end
  replacing = old.fingerprint ~= '' and fingerprint ~= '' and old.fingerprint ~= fingerprint
  if replacing and not replace then return {'mismatch', 0} end
  if replace and was_superseded() then return {'mismatch', 1} end
  if ended_for_good(old) and not replacing then return finished() end
  if old.state == PROCESSING then
    if old.lease_until > now then
      if old.waited_for == 0 then note_waiter() end
      return {'busy', old.lease_until - now, old.owner}
    end
    if old.hold or hold then return {'abandoned', old.number} end
  end
  if attempts and old.number >= attempts and not replacing then return {'exhausted', old.number} end
  write_when_full()
end

local new = {
  state = PROCESSING, owner = owner, hold = hold, retryable = false, keep = keep,
  number = old and not replacing and old.number + 1 or 1,  -- a new payload starts anew
  fence = next_fence(old, now),
  created = old and old.created or math.floor(now / 1000),
  waited_for = old and old.waited_for or 0,
  superseded = old and old.superseded or '',
  fingerprint = fingerprint,
  rest = ARGV[8],
}
if old and fingerprint == '' then
  new.fingerprint = old.fingerprint  -- no payload: does not erase what the key was first used for
end
if replacing then
  new.superseded = string.sub(new.superseded .. old.fingerprint, -16 * SUPERSEDED_LIMIT)
end
write_running(new, lease, now)
return {'claimed', new.number, new.fence, old and old.state == PROCESSING and 1 or 0}
