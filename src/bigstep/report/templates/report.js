"use strict";
(() => {
  const PAGE = 100;
  const PAPER = 660;
  const $$ = (selector) => [...document.querySelectorAll(selector)];

  // ---- tables: sorted, filtered and lengthened from the page's data ----
  function setUpTable(table, grid) {
    const key = table.dataset.grid;
    const more = document.querySelector(`[data-more="${key}"]`);
    const filter = document.querySelector(`[data-filter="${key}"]`);
    const text = (cell) => (Array.isArray(cell) ? cell[0] : cell);
    let rows = grid.rows, shown = PAGE, column = -1, sign = 1;

    function draw() {
      const words = filter ? filter.value.toLowerCase().split(/\s+/).filter(Boolean) : [];
      let found = rows;
      if (words.length) {
        found = rows.filter((row) => {
          const all = row.map(text).join(" ").toLowerCase();
          return words.every((word) => all.includes(word));
        });
      }
      const body = document.createElement("tbody");
      for (const row of found.slice(0, shown)) {
        const line = body.insertRow();
        row.forEach((cell, index) => {
          const place = line.insertCell();
          if (grid.columns[index].numeric) place.className = "number";
          let target = place;
          if (Array.isArray(cell) && cell[2]) {
            target = place.appendChild(document.createElement("a"));
            target.setAttribute("href", cell[2]);
          }
          target.textContent = text(cell);
        });
      }
      table.tBodies[0].replaceWith(body);
      const left = found.length - shown;
      more.hidden = left <= 0;
      more.textContent = `Show ${Math.min(PAGE, left)} more of ${left.toLocaleString("en")}`;
    }

    function sortBy(index) {
      const numeric = grid.columns[index].numeric;
      sign = column === index ? -sign : numeric ? -1 : 1;
      column = index;
      const value = (row) => (Array.isArray(row[index]) ? row[index][1] : null);
      rows = [...grid.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === null && y === null) return sign * text(a[index]).localeCompare(text(b[index]), "en", { numeric: true });
        if (x === null) return 1; // gaps last, in either sort order
        return y === null ? -1 : sign * (x - y);
      });
      [...table.tHead.rows[0].cells].forEach((head, at) => {
        if (at === index) head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
        else head.removeAttribute("aria-sort");
      });
      draw();
    }

    [...table.tHead.rows[0].cells].forEach((head, index) => {
      head.querySelector("button").addEventListener("click", () => sortBy(index));
    });
    if (filter) filter.addEventListener("input", () => { shown = PAGE; draw(); });
    more.addEventListener("click", () => { shown += PAGE; draw(); });
    draw();
  }

  // ---- links into collapsed sections open them ----
  function openTarget() {
    const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") {
      target.open = true;
      target.scrollIntoView();
    }
  }
  addEventListener("hashchange", openTarget);

  // ---- charts ----
  const plots = [];
  const hidden = new Set();

  function themed(layout) {
    const css = getComputedStyle(document.documentElement);
    const color = (name) => css.getPropertyValue(name).trim();
    const theme = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: css.getPropertyValue("--sans"), size: 13, color: color("--quiet") },
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink"), size: 13 } },
      legend: { ...layout.legend, bgcolor: "rgba(0,0,0,0)" },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    };
    for (const axis of ["xaxis", "yaxis"]) {
      const title = { ...(layout[axis] || {}).title, font: { size: 13 } };
      theme[axis] = { ...layout[axis], title, gridcolor: color("--grid"), linecolor: color("--line"), tickcolor: color("--line") };
    }
    return { ...layout, ...theme };
  }

  const members = (plot) => plot.data.map((trace, at) => [trace.meta && trace.meta.group, at]).filter(([group]) => group !== undefined);

  function showGroups() {
    for (const plot of plots) {
      const own = members(plot);
      if (own.length) Plotly.restyle(plot, { visible: own.map(([group]) => !hidden.has(group)) }, own.map(([, at]) => at));
    }
    for (const chip of $$(".chips [data-group]")) chip.setAttribute("aria-pressed", String(!hidden.has(Number(chip.dataset.group))));
  }

  let bringing = 0;
  function bringOut(group) {
    clearTimeout(bringing);
    bringing = setTimeout(() => {
      for (const plot of plots) {
        const own = members(plot);
        if (own.length) Plotly.restyle(plot, { opacity: own.map(([other]) => (group === null || other === group ? 1 : 0.12)) }, own.map(([, at]) => at));
      }
    }, 90);
  }

  function setUpChips() {
    for (const chip of $$(".chips [data-group]")) {
      const group = Number(chip.dataset.group);
      chip.addEventListener("click", () => {
        if (!hidden.delete(group)) hidden.add(group);
        showGroups();
      });
      chip.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && bringOut(hidden.has(group) ? null : group));
      chip.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && bringOut(null));
    }
    const all = document.getElementById("all-groups");
    if (all) all.addEventListener("click", () => { hidden.clear(); showGroups(); });
  }

  function retheme() {
    for (const plot of plots) Plotly.relayout(plot, themed(plot.layout));
  }

  async function start() {
    const data = JSON.parse(await unpack("packed-data"));
    for (const table of $$("[data-grid]")) setUpTable(table, data.grids[table.dataset.grid]);
    openTarget();
    await loadPlotly();
    const config = { responsive: true, displayModeBar: false };
    for (const [key, figure] of Object.entries(data.figures)) {
      const plot = document.querySelector(`#${key} .plot`);
      await Plotly.newPlot(plot, figure.data, themed(figure.layout), config);
      plots.push(plot);
    }
    setUpChips();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", retheme);
    matchMedia("print").addEventListener("change", retheme);
    // paper is narrower than the window for which the charts were drawn
    addEventListener("beforeprint", () => plots.forEach((plot) => Plotly.relayout(plot, { width: PAPER })));
    addEventListener("afterprint", () => plots.forEach((plot) => Plotly.relayout(plot, { width: null, autosize: true })));
    document.documentElement.dataset.ready = "yes";
  }

  start().catch((error) => {
    const trouble = document.getElementById("trouble");
    if (!trouble) return;
    trouble.hidden = false;
    trouble.textContent = typeof DecompressionStream === "undefined"
      ? "This browser is too old to draw the charts; any current one can. The tables below hold up to 100 rows each."
      : `The charts could not be drawn: ${error}`;
    console.error(error);
  });
})();
