-- Remember the ids of ended requests for longer than their records, in `ended` keys: a hash for each day (UTC, by the
-- server's clock) and each first byte of the SHA-1 of an id. A field is 16 more bytes of that SHA-1; its value is 8 bytes
-- of the SHA-1 of the name that was bound to the request, then 8 of that of its body's hash if that is known. A key
-- expires as a whole. A key that is no hash costs what it would remember, and no request: hence `pcall`.
local function pack_digest(digest, first, last)
  return (string.gsub(string.sub(digest, 2 * first - 1, 2 * last), '..', function(byte)
    return string.char(tonumber(byte, 16))
  end))
end
local function pack_name(name) return pack_digest(redis.sha1hex(name), 1, 8) end

-- `names` is the format of the keys, by day and first byte. Does nothing for 0 days, or without a bound name.
local function remember_end(names, days, id, bound, body)
  if days == 0 or bound == '' then return end
  local digest, today = redis.sha1hex(id), math.floor(redis.call('TIME')[1] / 86400)
  local key = string.format(names, today, string.sub(digest, 1, 2))
  local told = pack_name(bound) .. (body == '' and '' or pack_name(body))
  if type(redis.pcall('HSET', key, pack_digest(digest, 2, 17), told)) == 'number' then
    redis.call('EXPIREAT', key, (today + days + 1) * 86400)
  end
end

-- Return the value of an id that ended today or within so many days before; nil where there is none.
local function find_end(names, days, id)
  if days == 0 then return nil end
  local digest, today = redis.sha1hex(id), math.floor(redis.call('TIME')[1] / 86400)
  local field = pack_digest(digest, 2, 17)
  for day = today, today - days, -1 do
    local told = redis.pcall('HGET', string.format(names, day, string.sub(digest, 1, 2)), field)
    if type(told) == 'string' then return told end
  end
end
