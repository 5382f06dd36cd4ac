// A client of epikvd that knows the published protos and nothing else of it.
//
//   node client.js ADDRESS REQUEST BAD_REQUEST
//
// Streams the completion of one GenerateRequest and shows how another one fails; both as JSON, in
// the protos' names. Prints what it got as one line of JSON.

const path = require('path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const definition = loader.loadSync(['epikv/v1/generation.proto', 'epikv/v1/errors.proto'], {
  keepCase: true,
  longs: Number,
  enums: String,
  defaults: true,
  oneofs: true,
  includeDirs: [path.join(__dirname, '..', '..', '..', 'proto')],
});
const { epikv } = grpc.loadPackageDefinition(definition);

// google.rpc.Status and its details, as epikv.v1 has them.
const decode = (message, bytes) => definition[`epikv.v1.${message}`].deserialize(bytes);

function details(error) {
  const status = decode('Status', error.metadata.get('grpc-status-details-bin')[0]);
  return status.details.map(({ type_url, value }) => {
    const name = type_url.replace('type.googleapis.com/google.rpc.', '');
    return { type: name, ...decode(name, value) };
  });
}

function generate(client, request) {
  return new Promise((resolve) => {
    const events = [];
    client
      .Generate(request, { deadline: Date.now() + 60000 })
      .on('data', (message) => events.push({ [message.event]: message[message.event] }))
      .on('error', (error) => resolve({ events, error }))
      .on('end', () => resolve({ events }));
  });
}

async function main(address, request, badRequest) {
  const client = new epikv.v1.GenerationService(address, grpc.credentials.createInsecure());
  const { events, error } = await generate(client, JSON.parse(request));
  if (error) throw error;
  const refused = (await generate(client, JSON.parse(badRequest))).error;
  client.close();
  if (!refused) throw new Error('the bad request was taken');
  console.log(
    JSON.stringify({
      events,
      error: { code: grpc.status[refused.code], message: refused.details, details: details(refused) },
    })
  );
}

main(...process.argv.slice(2));
