-- ARGV: abandoned after (us). Removes an abandoned record that nobody holds.

local record = read()
if not record or record.state ~= PROCESSING then
  index_remove()
  return 0
end
if record.hold or record.lease_until > clock() - tonumber(ARGV[1]) then
  write_when_full()
  index_add(record)
  return 0
end
index_remove()
return redis.call('DEL', KEYS[1])
