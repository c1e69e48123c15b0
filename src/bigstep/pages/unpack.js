"use strict";
// five characters hold four bytes; a shorter last group is padded with the highest digit
function bytesOf(text) {
  const alphabet = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%,()*+-;.=>?@^_`{|}~";
  const value = new Uint8Array(128);
  for (let i = 0; i < 85; i++) value[alphabet.charCodeAt(i)] = i;
  const padding = (5 - (text.length % 5)) % 5;
  text += "~".repeat(padding);
  const bytes = new Uint8Array((text.length / 5) * 4);
  for (let i = 0, at = 0; i < text.length; i += 5) {
    let word = 0;
    for (let k = 0; k < 5; k++) word = word * 85 + value[text.charCodeAt(i + k)];
    bytes[at++] = word / 16777216; bytes[at++] = word / 65536; bytes[at++] = word / 256; bytes[at++] = word;
  }
  return bytes.subarray(0, bytes.length - padding);
}

function unpack(id) {
  const stream = new Blob([bytesOf(document.getElementById(id).textContent)]).stream();
  return new Response(stream.pipeThrough(new DecompressionStream("gzip"))).text();
}

async function loadPlotly() {
  const script = document.createElement("script");
  script.textContent = await unpack("packed-plotly");
  document.head.append(script);
}
