// OpenAI's client for Node, unmodified, through a gateway.
//
//   node openai_client.js BASE_URL MODEL PROMPT
//
// Prints what it got as one line of JSON.

const OpenAI = require('openai');

async function main([baseURL, model, prompt]) {
  const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });
  const ask = { model, prompt, temperature: 0, max_tokens: 40, kv: { policy: 'sliding', budget: 120 } };

  const models = [];
  for await (const each of client.models.list()) models.push(each.id);
  const whole = await client.completions.create(ask);

  const streamed = { text: '', usage: null, finish: null };
  const stream = await client.completions.create({
    ...ask,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const part of stream) {
    for (const choice of part.choices) {
      streamed.text += choice.text;
      streamed.finish = choice.finish_reason ?? streamed.finish;
    }
    streamed.usage = part.usage ?? streamed.usage;
  }

  const messages = [{ role: 'user', content: 'hello' }];
  const chat = await client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 5 });
  const helper = client.chat.completions.stream({ model, messages, temperature: 0, max_tokens: 5 });

  const errors = {};
  const failing = {
    policy: () => client.completions.create({ ...ask, kv: { policy: 'nonesuch', budget: 64 } }),
    model: () => client.completions.create({ ...ask, model: 'gpt-5' }),
    embeddings: () => client.embeddings.create({ model, input: 'x' }),
    deadline: () =>
      client.completions.create(
        { ...ask, max_tokens: 700, ignore_eos: true, kv: undefined },
        { headers: { timeout: '0.05' } },
      ),
  };
  for (const [name, call] of Object.entries(failing)) {
    try {
      await call();
    } catch (error) {
      errors[name] = { kind: error.constructor.name, status: error.status, param: error.param, code: error.code };
    }
  }

  const aborted = new AbortController();
  const left = await client.completions.create(
    { ...ask, max_tokens: 700, ignore_eos: true, kv: undefined, stream: true },
    { signal: aborted.signal },
  );
  for await (const _ of left) aborted.abort();

  console.log(
    JSON.stringify({
      models,
      text: whole.choices[0].text,
      usage: whole.usage,
      kv: whole.epikv.kv,
      streamed,
      chat: chat.choices[0].message,
      helper: (await helper.finalMessage()).content,
      errors,
    }),
  );
}

main(process.argv.slice(2)).catch((error) => {
  console.error(error);
  process.exit(1);
});
