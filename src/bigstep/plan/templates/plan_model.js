"use strict";
// The closed form of bigstep.plan in the browser: the same formulas as cost.py, scheme.py and simulate.py.
const planner = (() => {
  const STREAMED = 0.9;
  const sum = (list) => list.reduce((total, value) => total + value, 0);

  // Inverse of the normal distribution (Acklam's rational approximation, relative error below 1.2e-9).
  function inverseNormal(p) {
    const a = [-39.69683028665376, 220.9460984245205, -275.9285104469687, 138.357751867269, -30.66479806614716, 2.506628277459239];
    const b = [-54.47609879822406, 161.5858368580409, -155.6989798598866, 66.80131188771972, -13.28068155288572];
    const c = [-0.007784894002430293, -0.3223964580411365, -2.400758277161838, -2.549732539343734, 4.374664141464968, 2.938163982698783];
    const d = [0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416];
    if (p < 0.02425 || p > 1 - 0.02425) {
      const low = p < 0.5;
      const q = Math.sqrt(-2 * Math.log(low ? p : 1 - p));
      const x = (((((c[0] * q + c[1]) * q + c[2]) * q + c[3]) * q + c[4]) * q + c[5]) / ((((d[0] * q + d[1]) * q + d[2]) * q + d[3]) * q + 1);
      return low ? x : -x;
    }
    const q = p - 0.5, r = q * q;
    return (((((a[0] * r + a[1]) * r + a[2]) * r + a[3]) * r + a[4]) * r + a[5]) * q / (((((b[0] * r + b[1]) * r + b[2]) * r + b[3]) * r + b[4]) * r + 1);
  }
  const expectedMaximum = (n) => inverseNormal((n - 0.375) / (n + 0.25));

  function squarest(n) {
    let y = Math.floor(Math.sqrt(n));
    while (n % y) y -= 1;
    return [n / y, y];
  }
  function chooseGrid(n, perNode) {
    if (perNode < 2 || perNode >= n || n % perNode) return squarest(n);
    const nodes = n / perNode;
    let best = [perNode, nodes];
    for (let j = 2; j <= nodes; j += 1)
      if (nodes % j === 0 && perNode * j + nodes / j < best[0] + best[1]) best = [perNode * j, nodes / j];
    return best;
  }

  function nodeRate(c, nodes, senders) {
    const rate = c.adapters * c.between.bandwidth * c.between.efficiency;
    if (!c.rack || nodes <= c.rack) return rate;
    return Math.min(rate, (c.rack * rate) / c.oversubscription / Math.max(1, Math.min(senders, c.rack)));
  }
  const seconds = (link, rounds, bytes, rate) => link.start + rounds * link.latency + bytes * Math.max(1 / rate, link.copy);
  const rateOf = (link) => link.bandwidth * link.efficiency;
  const ringBytes = (n, N) => (N > 1 ? (2 * n * (N - 1)) / N : 0);

  function ring(n, ranks, perNode, c, flows, senders, nodes) {
    if (ranks <= 1) return 0;
    const rounds = 2 * (ranks - 1), bytes = ringBytes(n, ranks), crossed = Math.ceil(ranks / perNode);
    const insideRate = rateOf(c.inside);
    if (crossed === 1) return seconds(c.inside, rounds, bytes, insideRate);
    let rate = nodeRate(c, nodes || crossed, senders) / flows;
    const outer = perNode > 1 ? Math.min(rounds, 2 * crossed) : rounds;
    if (perNode > 1) rate = Math.min(rate, insideRate);
    return seconds(c.between, outer, bytes, rate) + (rounds - outer) * c.inside.latency;
  }
  function halvingTraffic(n, N) {
    if (N <= 1) return [0, 0];
    const p = 2 ** Math.floor(Math.log2(N)), bytes = (2 * n * (p - 1)) / p;
    return p === N ? [2 * Math.log2(p), bytes] : [2 * Math.log2(p) + 2, bytes + n];
  }

  // Seconds to sum n encoded bytes over `devices`, k in each of m nodes; names as in bigstep.tables.collectives.
  const PRICES = {
    ring: (n, c, devices, k) => ring(n, devices, k, c, 1, 1, 0),
    torus(n, c, devices, k, m) {
      const [X, Y] = chooseGrid(devices, c.perNode);
      return ring(n, X, Math.min(k, X), c, 1, 1, 0) +
        ring(n / X, Y, Math.min(Math.max(1, Math.floor(k / X)), Y), c, Math.min(X, k), Math.max(1, Math.floor(X / k)), m);
    },
    hierarchical(n, c, devices, k, m) {
      const inner = 4 * (k - 1), outer = 2 * (m - 1);
      return (inner ? seconds(c.inside, inner, (inner * n) / k, rateOf(c.inside)) : 0) +
        (outer ? seconds(c.between, outer, ringBytes(n, m), rateOf(c.between)) : 0);
    },
    hybrid: (n, c, devices) => exchange(n >= 65536 * devices ? "ring" : "hierarchical", n, c, devices),
    halving(n, c, devices, k, m) {
      const [inner, innerBytes] = halvingTraffic(n, k), [outer, outerBytes] = halvingTraffic(n / k, m);
      const near = Math.min(m, 2 ** Math.floor(Math.log2(c.rack || m)));
      const far = ((2 * n) / k) * Math.max(0, 1 / near - 1 / m);
      return (inner ? seconds(c.inside, inner, innerBytes, rateOf(c.inside)) : 0) + (outer ? c.between.start + outer * c.between.latency +
        Math.max(0, outerBytes - far) * Math.max(k / nodeRate(c, 1, 0), c.between.copy) + far * Math.max(k / nodeRate(c, m, c.rack), c.between.copy) : 0);
    },
    gather(n, c, devices, k, m) {
      const bytes = ringBytes(n, devices), outside = (bytes * (devices - k)) / (devices - 1);
      const link = m > 1 ? c.between : c.inside;
      let wire = (bytes - outside) / rateOf(c.inside);
      if (m > 1) wire = Math.max(wire, (outside * k) / nodeRate(c, m, c.rack));
      return link.start + 2 * link.latency + 2 * (devices - 1) * link.gap + Math.max(wire, bytes * link.copy);
    },
    switch(n, c, devices, k, m) {
      const within = k > 1 ? seconds(c.inside, 2 * (k - 1), ringBytes(n, k), rateOf(c.inside)) : 0;
      return within + (m > 1 ? seconds(c.between, 2, n / k, nodeRate(c, m, 1) / k) : 0);
    },
  };
  function exchange(collective, n, machine, devices) {
    if (!PRICES[collective]) throw new Error(`the page cannot price the collective ${collective}`);
    if (devices <= 1) return 0;
    const own = machine.collectives[collective] || {};
    const c = { ...machine, inside: { ...machine.inside, ...own }, between: { ...machine.between, ...own } };
    const k = Math.min(c.perNode, devices);
    return PRICES[collective](n, c, devices, k, Math.ceil(devices / k));
  }

  function codec(name, values, c, devices) {
    if (name === "none" || devices <= 1) return [0, 0];
    const speed = c.codecs[name];
    if (speed) return [speed.encodeCall + (4 * values) / speed.encode, speed.decodeCall + (4 * values) / speed.decode];
    const streamed = c.device.memoryRate * STREAMED, moved = c.traffic[name], again = moved.summable ? 0 : moved.encode / devices;
    return [(values * moved.encode) / streamed, (values * (moved.decode + again)) / streamed];
  }

  // One step: { devices, localBatch, collective, codec, bucketMb, bandwidth } on a model and a cluster.
  function predict(model, cluster, ask) {
    const c = { ...cluster, between: { ...cluster.between, bandwidth: ask.bandwidth || cluster.between.bandwidth } };
    const layers = model.layers, N = ask.devices, b = ask.localBatch;
    const slowest = 1 + c.jitter * expectedMaximum(N);
    const times = layers.map((layer, index) => {
      if (model.measuredBatch) return [(layer.forward * b) / model.measuredBatch, (layer.backward * b) / model.measuredBatch];
      const work = (b * layer.flops) / c.device.flops, fixed = c.device.launch * layer.launches;
      return [work + fixed / 3, work * (index ? 2 : 1) + (fixed * 2) / 3];
    });
    const forward = sum(times.map((pair) => pair[0])), backward = sum(times.map((pair) => pair[1]));
    let now = forward * slowest, values = 0, bytes = 0, coded = 0, sent = 0;
    const links = [];
    const close = () => {
      const [encode, decode] = codec(ask.codec, values, c, N);
      now += encode;
      coded += encode + decode;
      sent += bytes;
      links.push([now, exchange(ask.collective, bytes, c, N), decode]);
      values = 0;
      bytes = 0;
    };
    const first = layers.findIndex((layer) => layer.values > 0); // the last gradient to be ready; layers before it may have none
    for (let index = layers.length - 1; index >= 0; index -= 1) {
      now += times[index][1] * slowest;
      values += layers[index].values;
      bytes += layers[index].bytes[ask.codec];
      if (values && (index === first || values * 4 >= ask.bucketMb * 1e6)) close();
    }
    const ended = now;
    let end = 0, done = ended;
    for (const [ready, travel, decode] of links) {
      end = Math.max(end, ready) + travel;
      done = Math.max(done, end) + decode;
    }
    const update = model.optimizer || (model.parameters * model.update) / (c.device.memoryRate * STREAMED);
    done += update;
    const compute = forward + backward, fed = c.loader ? b / c.loader : 0;
    const split = {
      forward, backward, straggler: compute * (slowest - 1), codec: coded,
      exchange: Math.max(0, done - compute * slowest - coded - update), optimizer: update, data: Math.max(0, fed - done),
    };
    const step = Math.max(done, fed), batch = N * b;
    const epochs = model.law ? model.law.base + model.law.slope * batch : null;
    return {
      step, split, batch, rate: batch / step, efficiency: Math.max(compute + update, fed) / step, epochs,
      minutes: epochs && model.samples ? (epochs * model.samples * step) / batch / 60 : null,
      busy: sum(links.map((link) => link[1])), encoded: sent,
      memory: model.held * model.parameters + 4 * b * model.outputs,
    };
  }

  // The rate between nodes at which the best compressed scheme takes as long as the best plain one; null if one side
  // always wins. As in plan/crossover.py.
  function crossover(model, cluster, ask, plain = [{}], compressed = [{ collective: "gather", codec: "onebit" }]) {
    const best = (schemes, bandwidth) =>
      Math.min(...schemes.map((scheme) => predict(model, cluster, { ...ask, ...scheme, bandwidth }).step));
    const saved = (bandwidth) => best(plain, bandwidth) - best(compressed, bandwidth);
    let low = 1e6 / 8, high = 1e13 / 8;
    if (!(saved(low) > 0) || saved(high) > 0) return null;
    for (let i = 0; i < 40; i += 1) {
      const middle = Math.sqrt(low * high);
      if (saved(middle) > 0) low = middle; else high = middle;
    }
    return Math.sqrt(low * high);
  }
  return { predict, crossover, expectedMaximum, chooseGrid, collectives: Object.keys(PRICES) };
})();
