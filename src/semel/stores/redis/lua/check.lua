-- Reads a record that the index named, and puts right what the index says of it.

local record, raw = read()
if not record or record.state ~= PROCESSING then
  index_remove()
  return nil
end
write_when_full()
index_add(record)
return {raw, -1, clock()}  -- PROCESSING: its expiry is nobody's business
