-- ARGV: owner, lease (us); 0 parks the attempt: abandoned from now on, below 0: that long ago;
--   length and run_info, if that is to be replaced

local now = clock()
local record = read()
if not record or record.state ~= PROCESSING or record.owner ~= ARGV[1] then return 0 end
local lease = tonumber(ARGV[2])
if ARGV[3] then
  local length = string.byte(record.rest, 1) or 0
  record.rest = ARGV[3] .. string.sub(record.rest, length + 2)
end
write_when_full()
write_running(record, lease, now)
if lease <= 0 and record.waited_for ~= 0 then wake() end
return 1
