"use strict";
const facts = JSON.parse(document.getElementById("facts").textContent);
const by = (id) => document.getElementById(id);
const LINES = { none: "float32", fp16: "half precision", onebit: "1-bit" };
const PARTS = [["forward", "forward"], ["backward", "backward"], ["straggler", "slowest device"], ["codec", "codec"],
  ["exchange", "exchange, not hidden"], ["optimizer", "update"], ["data", "data"]];

function chosen() {
  const gpus = facts.counts[+by("gpus").value], rate = by("bandwidth"), codec = by("codec").value;
  const untouched = +rate.value === +rate.defaultValue; // the slider's steps miss most rates; untouched, it stands for the plan's exact one
  return {
    devices: gpus, localBatch: facts.batches[+by("batch").value], codec,
    bandwidth: untouched ? facts.cluster.between.bandwidth : (10 ** +rate.value * 1e9) / 8,
    collective: facts.cluster.traffic[codec].summable ? by("collective").value : "gather", bucketMb: +by("bucket").value,
  };
}
const number = (value, digits = 3) => value >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(digits));
const short = (value) => value >= 1e6 ? `${number(value / 1e6)} M` : number(value);
const clock = (minutes) => minutes === null ? "–" : minutes < 2 ? `${number(minutes * 60)} s` : minutes < 120 ? `${number(minutes)} min` : `${number(minutes / 60)} h`;

function theme() {
  const style = getComputedStyle(document.documentElement);
  const pick = (name) => style.getPropertyValue(name).trim();
  return { ink: pick("--ink"), quiet: pick("--quiet"), grid: pick("--grid"), family: pick("--sans"), colors: pick("--series").split(",").map((text) => text.trim()) };
}
function layout(look, x, y, more = {}) {
  const axis = { gridcolor: look.grid, linecolor: look.grid, zerolinecolor: look.grid, automargin: true, fixedrange: true };
  return {
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { color: look.quiet, size: 13, family: look.family }, colorway: look.colors,
    margin: { l: 8, r: 12, t: 8, b: innerWidth < 600 ? 130 : 96 }, height: 340, hovermode: "x unified", hoverlabel: { font: { size: 13 } },
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, font: { size: 12 }, traceorder: "normal" }, showlegend: true,
    xaxis: { ...axis, title: { text: x, standoff: 8, font: { size: 13 } }, ...more.xaxis }, yaxis: { ...axis, title: { text: y, standoff: 8, font: { size: 13 } }, rangemode: "tozero", ...more.yaxis },
    ...more.rest,
  };
}
const draw = (id, data, look) => Plotly.react(id, data, look, { displayModeBar: false, responsive: true });

function update() {
  const ask = chosen(), now = planner.predict(facts.model, facts.cluster, ask);
  by("collective").disabled = ask.collective === "gather";
  by("gpus-value").textContent = ask.devices.toLocaleString("en");
  by("bandwidth-value").textContent = `${number((ask.bandwidth * 8) / 1e9)} Gbit/s`;
  by("batch-value").textContent = `${number(ask.localBatch)} (global ${now.batch.toLocaleString("en")})`;
  by("step").textContent = `${number(now.step * 1e3)} ms`;
  by("rate").textContent = `${short(now.rate)}/s`;
  by("efficiency").textContent = `${number(now.efficiency * 100)} %`;
  by("time").textContent = clock(now.minutes);
  by("epochs").textContent = now.epochs ? `${Math.round(now.epochs)} epochs to ${facts.model.law.target}\u00a0%` : "no law of epochs against batch is known";
  const worst = PARTS.slice(2).reduce((best, part) => now.split[part[0]] > now.split[best[0]] ? part : best, PARTS[2]);
  by("loss").textContent = `largest loss: ${worst[1]}, ${number((now.split[worst[0]] / now.step) * 100, 2)} %`;
  const warnings = [];
  if (now.memory > facts.cluster.device.memory) warnings.push(`needs ${number(now.memory / 2 ** 30)} GiB a device, which has ${number(facts.cluster.device.memory / 2 ** 30)}`);
  if (facts.model.law && now.batch > facts.model.law.largest) warnings.push(`batch above the largest of the law (${facts.model.law.largest.toLocaleString("en")}): the time is an extrapolation`);
  by("warning").textContent = warnings.length ? `Note: ${warnings.join("; ")}.` : "";

  const look = theme(), counts = facts.counts;
  const all = counts.map((devices) => planner.predict(facts.model, facts.cluster, { ...ask, devices }));
  const labels = counts.map((count) => count.toLocaleString("en"));
  const every = innerWidth < 600 ? 3 : 2;
  const tick = { type: "category", tickangle: 0, tickvals: labels.filter((_, index) => (labels.length - 1 - index) % every === 0) };
  draw("split", PARTS.filter(([key]) => all.some((row) => row.split[key] > 0)).map(([key, name]) => ({
    type: "bar", name, x: labels, y: all.map((row) => row.split[key] * 1e3), hovertemplate: "%{y:.2f} ms", marker: { color: look.colors[PARTS.findIndex((part) => part[0] === key)] },
  })), layout(look, "devices", "ms a step", { xaxis: tick, rest: { barmode: "stack", bargap: 0.25 } }));
  const names = facts.collectives;
  draw("scaling", names.map((collective, index) => ({
    type: "scatter", mode: "lines", name: collective, x: labels, line: { width: collective === ask.collective ? 4 : 2, color: look.colors[index ? index + 1 : 0] }, // the second is a shade of the first
    y: counts.map((devices) => 100 * planner.predict(facts.model, facts.cluster, { ...ask, devices, collective, codec: collective === "gather" ? "onebit" : ask.codec === "onebit" ? "fp16" : ask.codec }).efficiency),
    hovertemplate: "%{y:.1f} %",
  })), layout(look, "devices", "efficiency, %", { xaxis: tick, yaxis: { range: [0, 104] } }));
  if (facts.model.law) {
    const usable = (row) => row.batch <= facts.model.law.furthest ? row.minutes : null;
    const bests = counts.map((devices) => Math.min(...facts.batches.map((localBatch) => {
      const row = planner.predict(facts.model, facts.cluster, { ...ask, devices, localBatch });
      return row.memory > facts.cluster.device.memory ? Infinity : usable(row) ?? Infinity;
    })));
    const shown = [...all.map(usable), ...bests].filter((value) => value !== null && Number.isFinite(value));
    const unit = Math.max(...shown) > 300 ? ["hours", 60] : ["minutes", 1];
    const scaled = (values) => values.map((value) => value === null || !Number.isFinite(value) ? null : value / unit[1]);
    draw("accuracy", [
      { type: "scatter", mode: "lines+markers", name: `${number(ask.localBatch)} ${facts.model.unit} a device`, x: labels, y: scaled(all.map(usable)), hovertemplate: `%{y:.3g} ${unit[0]}` },
      { type: "scatter", mode: "lines", name: "best batch", x: labels, y: scaled(bests), line: { dash: "dot" }, hovertemplate: `%{y:.3g} ${unit[0]}` },
    ], layout(look, "devices", `${unit[0]} to ${facts.model.law.target} %`, { xaxis: tick, yaxis: { type: "log", rangemode: "normal", dtick: 1 } }));
  }
  const rates = Array.from({ length: 61 }, (_, i) => 10 ** (-2 + i / 12));
  const dense = ask.collective === "gather" ? "halving" : ask.collective;
  draw("crossing", Object.entries(LINES).map(([codec, name], index) => ({
    type: "scatter", mode: "lines", name: codec === "onebit" ? name : `${name}, ${dense}`, x: rates, line: { color: look.colors[index + 1], width: 2.5 },
    y: rates.map((gbit) => 1e3 * planner.predict(facts.model, facts.cluster, { ...ask, bandwidth: (gbit * 1e9) / 8, codec, collective: codec === "onebit" ? "gather" : dense }).step),
    hovertemplate: "%{y:.4g} ms",
  })), layout(look, "Gbit/s between nodes", "ms a step", {
    xaxis: { type: "log", dtick: 1, hoverformat: ".3g", tickformat: "~g" }, yaxis: { type: "log", rangemode: "normal", dtick: 1 },
    rest: { shapes: [{ type: "line", x0: (ask.bandwidth * 8) / 1e9, x1: (ask.bandwidth * 8) / 1e9, yref: "paper", y0: 0, y1: 1, line: { color: look.quiet, dash: "dot", width: 1.5 } }] },
  }));
  // the same schemes as in the sentences below: each side at its best
  const sizes = [4, 64];
  const plain = names.filter((name) => name !== "gather").flatMap((collective) => ["none", "fp16"].flatMap((codec) => sizes.map((bucketMb) => ({ collective, codec, bucketMb }))));
  const onebit = sizes.map((bucketMb) => ({ collective: "gather", codec: "onebit", bucketMb }));
  const cross = planner.crossover(facts.model, facts.cluster, ask, plain, onebit);
  by("crossover").textContent = ask.devices <= facts.cluster.perNode ? "Nothing leaves the node, so there is nothing to compress."
    : cross === null ? "At its best, 1-bit meets no plain exchange between 1 Mbit/s and 10 Tbit/s."
      : `At its best, 1-bit beats every plain exchange below ${number((cross * 8) / 1e9)} Gbit/s; the dotted line is the rate chosen above.`;
}
let waiting = 0;
function soon() {
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(update);
}
for (const id of ["gpus", "bandwidth", "batch", "collective", "codec", "bucket"]) by(id).addEventListener("input", soon);
by("restart").addEventListener("click", () => { by("controls").reset(); soon(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
loadPlotly().then(() => {
  update();
  document.documentElement.dataset.ready = "yes";
});
