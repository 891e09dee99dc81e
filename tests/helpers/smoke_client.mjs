// A gRPC client of nothing but Node's own HTTP/2: streams one answer.
// node smoke_client.mjs HOST:PORT REQUEST_IN_HEX -> a line of hex a message, then "status=CODE"
import http2 from "node:http2";

const [address, requestHex] = process.argv.slice(2);
const request = Buffer.from(requestHex, "hex");
const prefix = Buffer.alloc(5); // not compressed, 4 bytes of length
prefix.writeUInt32BE(request.length, 1);

const session = http2.connect(`http://${address}`);
const call = session.request({
  ":method": "POST",
  ":path": "/jaxpaged.v1.InferenceService/Stream",
  "content-type": "application/grpc",
  te: "trailers",
});
let pending = Buffer.alloc(0);
call.on("data", (data) => {
  pending = Buffer.concat([pending, data]);
  while (pending.length >= 5 && pending.length >= 5 + pending.readUInt32BE(1)) {
    const end = 5 + pending.readUInt32BE(1);
    console.log(pending.subarray(5, end).toString("hex"));
    pending = pending.subarray(end);
  }
});
call.on("trailers", (headers) => console.log(`status=${headers["grpc-status"]}`));
call.on("end", () => session.close());
call.end(Buffer.concat([prefix, request]));
