-- wrk: streams of OUTPUT tokens after random prompts of INPUT token ids, which no other request has.
local model, input, output = os.getenv("MODEL"), tonumber(os.getenv("INPUT")), tonumber(os.getenv("OUTPUT"))
math.randomseed(tonumber(os.getenv("SEED")))
request = function()
  local prompt = {}
  for i = 1, input do prompt[i] = math.random(3, 500) end
  local body = string.format('{"model":"%s","prompt":[%s],"max_tokens":%d,"stream":true,"ignore_eos":true}',
    model, table.concat(prompt, ","), output)
  return wrk.format("POST", "/v1/completions", {["Content-Type"] = "application/json"}, body)
end
