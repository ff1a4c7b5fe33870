"use strict";
(() => {
  const PAGE = 50;
  const $ = (id) => document.getElementById(id);
  // Only text nodes are made of what a record says: nothing of it can become markup.
  const el = (tag, props, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(props || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children) if (child !== null && child !== undefined) node.append(child);
    return node;
  };
  // The script runs before the browser has read what stands behind it.
  const read = new Promise((resolve) => document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", resolve) : resolve());
  const text = async (id) => {
    await read;
    const packed = atob($(id).textContent), bytes = new Uint8Array(packed.length);
    for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  const unpack = async (id) => JSON.parse(await text(id));
  const once = (make) => { let made = null; return () => (made = made || make()); };
  const details = once(() => unpack("data-details"));
  const specs = once(() => unpack("data-specs"));
  const vega = once(async () => {
    const script = el("script");
    script.textContent = await text("data-vega");
    document.head.append(script);
    return window.vegaEmbed;
  });

  const start = () => {
    performance.mark("nfp-start");
    const data = JSON.parse($("data-table").textContent);
    // Of each column its different values, and which of them a case has.
    const columns = data.columns, count = columns.id[1].length;
    const at = (name, i) => columns[name][0][columns[name][1][i]];
    const words = once(() => {
      const found = Array(count);
      for (let i = 0; i < count; i++) found[i] = (at("id", i) + " " + at("outcome", i) + " " + at("kind", i)).toLowerCase();
      return found;
    });
    const ranks = {};  // Of each value of a column, its place in their order.
    const state = { query: [], chosen: {}, by: null, down: false, shown: PAGE, rows: [] };
    const facets = data.facets.map(([name]) => name).filter((name) => !["outcome", "changed", "kind"].includes(name) && columns[name][0].length > 1);
    // What a case is stands behind what was found: its name says it too, and n_max must be in sight.
    const shown = ["outcome", "changed", "kind", ...data.numbers.map(([name]) => name), ...facets];
    const names = Object.fromEntries([...data.facets, ...data.numbers, ["id", "Case"]]);
    const numeric = new Set(["batch", "context", "top_k", "n_idle", "n_max", "first_exit"]);

    // Filters: one choice a column that has more than one value, and words that must all occur.
    const search = el("input", { type: "search", id: "query", autocomplete: "off", size: 28 });
    search.addEventListener("input", () => { state.query = search.value.toLowerCase().split(/\s+/).filter(Boolean); update(); });
    $("filters").append(el("label", {}, "Search", search));
    for (const [name, title] of data.facets) {
      const [values, codes] = columns[name];
      if (values.length < 2) continue;
      const counted = Array(values.length).fill(0);
      for (const code of codes) counted[code]++;
      const select = el("select", { "data-facet": name }, el("option", { value: "" }, "all"));
      const sorted = inOrder(values);
      sorted.forEach((code, i) => select.append(el("option", { value: i + 1 }, `${values[code] === null ? "none" : values[code]} (${counted[code]})`)));
      select.addEventListener("change", () => {
        if (select.value) state.chosen[name] = sorted[select.value - 1]; else delete state.chosen[name];
        update();
      });
      $("filters").append(el("label", {}, title, select));
    }
    $("filters").append(el("button", { type: "reset" }, "Show all"));
    $("filters").addEventListener("submit", (event) => event.preventDefault());
    $("filters").addEventListener("reset", () => { state.query = []; state.chosen = {}; setTimeout(update); });

    const head = el("tr", {});
    for (const name of ["id", ...shown]) {
      const button = el("button", { type: "button", onclick: () => {
        state.down = state.by === name && !state.down;
        state.by = name;
        update();
      } }, names[name]);
      head.append(el("th", { scope: "col", "data-column": name, class: numeric.has(name) ? "n" : null }, button));
    }
    $("table").tHead.append(head);
    $("more").addEventListener("click", () => { const from = state.shown; state.shown += 10 * PAGE; fill(from); });

    function order(a, b) {
      if (a === b) return 0;
      if (a === null) return 1;  // What is not there comes last.
      if (b === null) return -1;
      if (typeof a === "number" && typeof b === "number") return a - b;
      if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
      return compare(a, b);
    }

    function inOrder(values) { return values.map((_, code) => code).sort((a, b) => order(values[a], values[b])); }

    function ranked(name) {
      if (!ranks[name]) {
        const values = columns[name][0], rank = Array(values.length);
        inOrder(values).forEach((code, i) => { rank[code] = values[code] === null ? values.length : i; });
        ranks[name] = rank;
      }
      return ranks[name];
    }

    function update() {
      const chosen = Object.entries(state.chosen).map(([name, code]) => [columns[name][1], code]), rows = [];
      const said = state.query.length ? words() : null;
      for (let i = 0; i < count; i++) {
        if (chosen.every(([codes, code]) => codes[i] === code) && state.query.every((word) => said[i].includes(word))) rows.push(i);
      }
      if (state.by !== null) {
        const codes = columns[state.by][1], rank = ranked(state.by), way = state.down ? -1 : 1;
        // What is not there has the last rank, whichever way.
        const last = rank.length;
        rows.sort((a, b) => {
          const x = rank[codes[a]], y = rank[codes[b]];
          return (x === last || y === last ? x - y : way * (x - y)) || a - b;
        });
      }
      state.rows = rows;
      state.shown = PAGE;
      for (const th of head.children) {
        if (th.dataset.column === state.by) th.setAttribute("aria-sort", state.down ? "descending" : "ascending"); else th.removeAttribute("aria-sort");
      }
      $("count").textContent = `${rows.length} of ${count} cases`;
      $("table").tBodies[0].replaceChildren();
      fill(0);
    }

    function fill(from) {
      const part = document.createDocumentFragment();
      for (const i of state.rows.slice(from, state.shown)) part.append(row(i));
      $("table").tBodies[0].append(part);
      const left = state.rows.length - state.shown;
      $("more").hidden = left <= 0;
      $("more").textContent = `Show more (${left} not shown)`;
    }

    function row(i) {
      const id = at("id", i), tr = el("tr", { "data-case": id });
      const button = el("button", { type: "button", "aria-expanded": "false", onclick: () => toggle(i, tr, button) }, el("bdi", {}, id));
      tr.append(el("th", { scope: "row" }, button));
      for (const name of shown) {
        const value = at(name, i);
        const cell = el("td", { class: numeric.has(name) ? "n" : name === "outcome" ? `outcome ${value}` : null, "data-field": name });
        if (value !== null) cell.append(String(value));
        tr.append(cell);
      }
      return tr;
    }

    async function toggle(i, tr, button) {
      const isOpen = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!isOpen));
      if (isOpen) { tr.nextElementSibling.remove(); return; }
      const cell = el("td", { colspan: shown.length + 1 }, "…");
      tr.after(el("tr", { class: "detail" }, cell));
      const found = Object.assign({}, ...(await details())[i]);
      cell.replaceChildren(el("div", { class: "panel" }, ...describe(i, found)));
      for (const [kind, rows] of [["curve", found.marks && curveRows(i, found)], ["strip", found.strip && { strip: found.strip }]]) {
        if (rows) await draw(cell.querySelector(`[data-chart=${kind}]`), kind, rows);
      }
    }

    // As charts.curve_rows makes it for the page without script; a test holds the two drawings to each other.
    function curveRows(i, c) {
      const top = data.shownRatio, tolerance = data.tolerances[data.runs[i]];
      const atBase = (curve) => { const found = (curve || []).find(([n]) => n === c.baseline_positions); return found && found[1]; };
      const base = atBase(c.curve), was = atBase(c.beforeCurve), first = c.curve[0][0];
      const past = c.curve.find(([, us]) => us / base > top), last = (past || c.curve[c.curve.length - 1])[0];
      const cut = (ratio) => Math.min(ratio, top);
      const ratios = (curve, to) => curve.filter(([n]) => first <= n && n <= last).map(([n, us]) => ({ n, ratio: cut(us / to) }));
      const intervals = new Map((c.ratios || []).map(([n, low, high]) => [n, [low, high]]));
      return {
        points: c.curve.filter(([n]) => n <= last).map(([n, us]) => {
          const [low, high] = intervals.get(n) || [us / base, us / base];
          return { n, us, ratio: cut(us / base), low: cut(low), high: cut(high), within: us / base <= 1 + tolerance };
        }),
        limit: [{ ratio: 1 + tolerance }],
        edges: ((c.granularity && c.granularity.edges) || []).filter((n) => first < n && n < last).map((n) => ({ n })),
        before: was ? ratios(c.beforeCurve, was) : [],
        composed: ratios((c.composed && c.composed.curve) || [], base),
        marks: c.marks,
      };
    }

    function describe(i, c) {
      const parts = [];
      for (const [question, { outcome, reasons = [] }] of Object.entries(c.tests).sort()) {
        parts.push(el("p", {}, el("span", { class: `outcome ${outcome}` }, outcome), ` ${question}`, reasons.length ? ": " : "", el("bdi", {}, reasons.join("; "))));
      }
      if (c.changes.length) parts.push(el("p", {}, el("strong", {}, "Changed"), ` against ${c.before}: ${c.changes.join("; ")}`));
      const kind = at("kind", i);
      if (c.marks) {
        const said = `T(N) over N, ${kind}: n_max ${at("n_max", i)} ${at("interval", i) || ""}`;
        parts.push(el("figure", {}, el("div", { "data-chart": "curve", role: "img", "aria-label": said }),
          el("figcaption", { class: "soft" }, `T(N)/T(N0 = ${c.baseline_positions}), ${kind}. Dashed across: the limit 1 + ${data.tolerances[data.runs[i]]}. Dotted upright: ends of tiles.`
            + (c.beforeCurve ? " Dashed grey: before." : "") + (c.composed && c.composed.curve ? " Dotted violet: the sum of the modules." : ""))));
        parts.push(curveTable(c));
      }
      if (c.strip) parts.push(el("figure", {}, el("div", { "data-chart": "strip", role: "img", "aria-label": `Rows of a tile over row counts: ${tiles(c.granularity.tiles)}` }),
        el("figcaption", { class: "soft" }, `Rows of a tile over row counts M (${c.granularity.kernel}): ${tiles(c.granularity.tiles)}. ${(c.granularity.warnings || []).join(" ")}`)));
      if (c.executed) parts.push(executedTable(c.executed));
      parts.push(facts(c));
      if (c.log) parts.push(el("p", {}, "Last lines of the engine:"), el("pre", {}, c.log.join("\n")));
      return parts;
    }

    function tiles(ranges) { return ranges.map(([a, b, t]) => `${a} to ${b}: ${t}`).join(", "); }

    function curveTable(c) {
      const header = el("tr", {}, el("th", { scope: "row" }, "N")), rows = [header];
      for (const [n] of c.curve) header.append(el("th", { scope: "col", class: "n" }, String(n)));
      const add = (title, of) => {
        const line = el("tr", {}, el("th", { scope: "row" }, title));
        for (const [n, us] of c.curve) line.append(el("td", { class: "n" }, of(n, us)));
        rows.push(line);
      };
      const addKnown = (title, values, of = String) => { if (values) add(title, (n, us) => values[n] === undefined ? "" : of(values[n], us)); };
      add("T(N) us", (_, us) => String(us));
      addKnown("step us", c.steps);
      addKnown("beside the forward us", c.steps, (step, us) => (step - us).toFixed(1));
      // Below N0 fewer experts are read: the floor is another.
      if (c.floor_us) add("of the byte floor", (n, us) => n < c.baseline_positions ? "" : `${(us / c.floor_us).toFixed(1)}x`);
      addKnown("experts read", c.active_experts);
      addKnown("graph", c.modes);
      addKnown("padded to", c.padded);
      addKnown("setting", c.settings);
      return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Curve" }, el("table", {}, ...rows));
    }

    function executedTable(executed) {
      const rows = ["N", "executed FLOPs", "predicted by the map"].map((title) => el("tr", {}, el("th", { scope: "row" }, title)));
      for (const [n, [done, predicted]] of Object.entries(executed)) [n, done, predicted].forEach((value, at) => rows[at].append(el("td", { class: "n" }, String(value))));
      return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Executed work" }, el("table", {}, ...rows));
    }

    function facts(c) {
      const list = el("dl", {});
      const add = (title, value) => { if (value !== undefined && value !== null && value !== "") list.append(el("dt", {}, title), el("dd", {}, el("bdi", {}, value))); };
      const pairs = (map) => map && Object.entries(map).map(([k, v]) => `${k} ${typeof v === "object" ? JSON.stringify(v) : v}`).join(", ");
      for (const [name, term] of Object.entries(c.predicted || {})) add(name.replace("_", " ") + " (predicted)", `N_max ${term.n_max}${term.interval ? ` [${term.interval[0]}, ${term.interval[1] ?? ".."}]` : ""}, limited by ${term.limiting}`);
      add("predicted on", c.basis);
      if (c.composed) add("composed of its modules", c.composed.reason || `N_max ${c.composed.n_max}, ${c.composed.steps} steps from the measured one, limited by ${c.composed.limiting}, T ${(100 * c.composed.error).toFixed(0)}% off in the median`);
      const beside = c.composed && c.composed.predicted;
      if (beside) add("predicted against measured", beside.reason || `${Object.entries(beside.steps).map(([name, n]) => `${name.replace("_", " ")} ${n} steps off`).join(", ")}; tile roofline's T ${(100 * beside.error).toFixed(0)}% off in the median`);
      add("N_max by tolerance", pairs(c.sensitivity));
      add("source of the curve", c.source);
      add("kernel", c.kernel);
      add("timer", c.timer);
      if (c.granularity) add("source of the map", `${c.granularity.source}; ${c.granularity.origin} ${c.granularity.artifact || ""} ${c.granularity.sha256 ? "sha256 " + c.granularity.sha256 : ""}`);
      add("measured by", pairs(c.counts));
      add("trust", pairs(c.trust));
      if (c.proof) add("proof of N", Object.entries(c.proof).map(([n, [rows, cached]]) => `N=${n}: ${rows} over ${cached}`).join(", "));
      if (c.kernels) add("kernels", [...new Set(Object.values(c.kernels))].join("; "));
      if (c.floor_us) add("byte floor", `${c.floor_us.toFixed(1)} us`);
      return list;
    }

    async function draw(place, kind, rows) {
      const embed = await vega(), spec = structuredClone((await specs())[kind]);
      for (const source of spec.data) {
        if (source.source === undefined && rows[source.name]) source.values = rows[source.name];
      }
      const inner = el("div");  // The library names what it draws in; the place keeps the page's own name.
      place.append(inner);
      // ast: Vega's own interpreter runs a chart's expressions, so that the page allows no eval.
      await embed(inner, spec, { mode: "vega", ast: true, renderer: "svg", actions: false, defaultStyle: false, logLevel: 1 });
      const svg = place.querySelector("svg");
      svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
      svg.setAttribute("aria-hidden", "true");
    }

    $("live").hidden = false;
    update();
    performance.mark("nfp-ready");
    document.documentElement.dataset.ready = "true";
  };
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  // Without it the page stays as it is: what matters most stands in it.
  if ("DecompressionStream" in window) {
    try { start(); } catch (error) { document.documentElement.classList.remove("js"); throw error; }
  }
})();
