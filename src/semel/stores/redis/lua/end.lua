-- ARGV: owner, outcome, state (SUCCEEDED or FAILED), ttl (ms), retryable, keep fingerprint,
--   and 1 if the function was never called: then the attempt's number is given back

local owner, state = ARGV[1], tonumber(ARGV[3])
local now = clock()
local record = parse(found)
if record.owner ~= owner then return 0 end
if record.state == state then return 1 end  -- sent twice: the same answer
if record.state ~= PROCESSING then return 0 end
record.state = state
record.retryable = ARGV[5] == '1'
if ARGV[6] ~= '1' then record.fingerprint = '' end
if ARGV[7] == '1' then record.number = record.number - 1 end
write_when_full()
write_ended(record, ARGV[2], tonumber(ARGV[4]), now)
return 1
