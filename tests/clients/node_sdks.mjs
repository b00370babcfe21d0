// openai, @anthropic-ai/sdk and Vercel's AI SDK (its four providers that fit): see node_sdks.py.

import assert from "node:assert";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI, { toFile } from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { BASE_URL, API_KEY, MODEL } = process.env;
const baseURL = `${BASE_URL}/v1`;
const openai = new OpenAI({ apiKey: API_KEY, baseURL, maxRetries: 0 });
const anthropic = new Anthropic({ apiKey: API_KEY, baseURL: BASE_URL, maxRetries: 0 });
const messages = [{ role: "user", content: "Name three colours." }];
const colour = z.object({ colour: z.enum(["red", "blue"]) });
const isColour = ({ colour: name }) => assert(["red", "blue"].includes(name), name);
let numChecks = 0;

async function check(name, run) {
  try {
    await run();
  } catch (error) {
    console.log(`${name}: ${error.stack} ${error.responseBody ?? ""}`);
    process.exitCode = 1;
    return;
  }
  numChecks += 1;
}

await check("openai: a stream adds up to the whole answer", async () => {
  const asked = { model: MODEL, messages, max_tokens: 12, temperature: 0 };
  const whole = await openai.chat.completions.create(asked);
  const stream = openai.chat.completions.stream({ ...asked, stream_options: { include_usage: true } });
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
  assert.equal(final.usage.total_tokens, whole.usage.total_tokens);
});
await check("openai: parse", async () => {
  const response_format = zodResponseFormat(colour, "colour");
  const parsed = await openai.chat.completions.parse({ model: MODEL, messages, max_tokens: 60, response_format });
  isColour(parsed.choices[0].message.parsed);
});
await check("openai: responses", async () => {
  const stream = openai.responses.stream({ model: MODEL, input: "Say hello.", max_output_tokens: 16 });
  const final = await stream.finalResponse();
  assert(final.output_text);
  assert.equal((await openai.responses.retrieve(final.id)).output_text, final.output_text);
});
await check("openai: embeddings as base64", async () => {
  const { data } = await openai.embeddings.create({ model: MODEL, input: ["a", "b"] });
  const floats = await openai.embeddings.create({ model: MODEL, input: ["a", "b"], encoding_format: "float" });
  assert.equal(data.length, 2);
  data[1].embedding.forEach((value, idx) => assert(Math.abs(value - floats.data[1].embedding[idx]) < 1e-6));
});
await check("openai: a batch", async () => {
  const line = { custom_id: "1", method: "POST", url: "/v1/chat/completions", body: { model: MODEL, messages, max_tokens: 4 } };
  const file = await openai.files.create({ file: await toFile(Buffer.from(JSON.stringify(line)), "b.jsonl"), purpose: "batch" });
  let batch = await openai.batches.create({ input_file_id: file.id, endpoint: line.url, completion_window: "24h" });
  for (let waits = 0; waits < 240 && batch.status !== "completed"; waits += 1) {
    await new Promise((resolve) => setTimeout(resolve, 500));
    batch = await openai.batches.retrieve(batch.id);
  }
  const results = await (await openai.files.content(batch.output_file_id)).text();
  assert.equal(JSON.parse(results).custom_id, "1");
});
await check("openai: an upload in parts", async () => {
  const upload = await openai.uploads.create({ bytes: 4, filename: "b.jsonl", mime_type: "application/jsonl", purpose: "batch" });
  const part_ids = [];
  for (const text of ["ab", "cd"]) {
    part_ids.push((await openai.uploads.parts.create(upload.id, { data: await toFile(Buffer.from(text), "part") })).id);
  }
  const { file } = await openai.uploads.complete(upload.id, { part_ids });
  assert.equal(await (await openai.files.content(file.id)).text(), "abcd");
});
await check("openai: an error by its class", async () => {
  await assert.rejects(openai.chat.completions.create({ model: "nobody", messages }), OpenAI.NotFoundError);
});
await check("anthropic: a stream adds up to the whole answer", async () => {
  const asked = { model: MODEL, messages, max_tokens: 12, temperature: 0 };
  const whole = await anthropic.messages.create(asked);
  const final = await anthropic.messages.stream(asked).finalMessage();
  assert.deepEqual(final.content, whole.content);
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
});
await check("anthropic: a forced tool", async () => {
  const input_schema = { type: "object", properties: { n: { type: "integer" } }, required: ["n"], additionalProperties: false };
  const tools = [{ name: "count", description: "Counts.", input_schema }];
  const tool_choice = { type: "tool", name: "count", disable_parallel_tool_use: true };
  const final = await anthropic.messages.stream({ model: MODEL, messages, max_tokens: 60, tools, tool_choice }).finalMessage();
  assert(Number.isInteger(final.content.find((block) => block.type === "tool_use").input.n));
});
await check("anthropic: a message batch", async () => {
  const params = { model: MODEL, messages, max_tokens: 4 };
  let batch = await anthropic.messages.batches.create({ requests: [{ custom_id: "1", params }] });
  for (let waits = 0; waits < 240 && batch.processing_status !== "ended"; waits += 1) {
    await new Promise((resolve) => setTimeout(resolve, 500));
    batch = await anthropic.messages.batches.retrieve(batch.id);
  }
  const results = [];
  for await (const one of await anthropic.messages.batches.results(batch.id)) results.push(one);
  assert.deepEqual(results.map((one) => [one.custom_id, one.result.type]), [["1", "succeeded"]]);
});

const providers = {
  "chat": createOpenAI({ apiKey: API_KEY, baseURL }).chat(MODEL),
  "responses": createOpenAI({ apiKey: API_KEY, baseURL })(MODEL),
  "compatible": createOpenAICompatible({ name: "h", apiKey: API_KEY, baseURL, includeUsage: true, supportsStructuredOutputs: true })(MODEL),
  "anthropic": createAnthropic({ apiKey: API_KEY, baseURL })(MODEL),
};
for (const [name, model] of Object.entries(providers)) {
  const asked = { model, prompt: "Name three colours.", maxOutputTokens: 12, temperature: 0, maxRetries: 0 };
  await check(`ai ${name}: a stream adds up to the whole answer`, async () => {
    const whole = await generateText(asked);
    assert(whole.text);
    const stream = streamText({ ...asked, onError({ error }) { throw error; } });
    assert.equal(await stream.text, whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  });
  await check(`ai ${name}: an object`, async () => {
    isColour((await generateObject({ ...asked, maxOutputTokens: 60, schema: colour })).object);
  });
  await check(`ai ${name}: a tool is called`, async () => {
    const execute = async ({ colour: said }) => `${said} it is`;
    const look = tool({ description: "Looks up a colour.", inputSchema: colour, execute });
    // Cut off after some calls: a small model goes on calling as long as it may.
    const told = await generateText({ ...asked, maxOutputTokens: 200, tools: { look }, toolChoice: "required", stopWhen: stepCountIs(1) });
    isColour(told.steps[0].toolCalls[0].input);
  });
}
console.log(`${numChecks} checks`);
