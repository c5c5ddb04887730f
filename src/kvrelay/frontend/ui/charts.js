// Rates, latency, load and KV over the last five minutes or the last hour, drawn by uPlot (global `uPlot`, see uplot/).

import { bytes, clock, h, milliseconds, percent, rate } from "./dom.js";

const HEIGHT_PX = 150;
const SPANS = ["five minutes", "hour"];
const HOUR_INTERVAL_MS = 15000;
/** Columns that count what came in a row's time; the others are levels. */
const COUNTS = [
  ..."answered refused failed in_time late_first_token late_gaps tokens prompt_tokens cached_tokens".split(" "),
  ..."places loaded_tokens handoffs workers_cpu_s frontends_cpu_s".split(" "),
];

/** The history's rows by their second, with counts per second. A group of columns becomes columns `group.name`. */
export function rowsOf({ unix_s, step_s = 1, ...given }) {
  const columns = {};
  for (const [name, column] of Object.entries(given)) {
    if (Array.isArray(column)) columns[name] = column;
    else for (const [part, values] of Object.entries(column)) columns[`${name}.${part}`] = values;
  }
  const names = Object.keys(columns);
  const value = (name, at) => columns[name][at] / (COUNTS.includes(name.split(".")[0]) ? step_s : 1);
  const rowAt = (at) => Object.fromEntries(names.map((name) => [name, columns[name][at] === null ? null : value(name, at)]));
  return new Map(unix_s.map((second, at) => [second, rowAt(at)]));
}

/** A decode worker had no choice. */
const FORCED = ["queue_full", "no_prefill_worker", "required", "unpaired"].map((reason) => `places.local_${reason}`);

/** Each chart's lines: name, colour (a variable of app.css), value of a second of history. */
const CHARTS = [
  {
    title: "requests per second",
    format: rate,
    lines: [
      ["answered", "--decode", (row) => row.answered],
      ["refused", "--warning", (row) => row.refused],
      ["failed", "--error", (row) => row.failed],
    ],
  },
  {
    title: "answers within their objectives per second (goodput)",
    format: rate,
    lines: [
      ["in time", "--decode", (row) => row.in_time],
      ["first token late", "--warning", (row) => row.late_first_token],
      ["tokens late", "--both", (row) => row.late_gaps],
    ],
  },
  {
    title: "tokens per second",
    format: rate,
    lines: [["answers", "--decode", (row) => row.tokens], ["prompts", "--prefill", (row) => row.prompt_tokens]],
  },
  {
    title: "time to first token",
    format: milliseconds,
    lines: [["p50", "--prefill", (row) => row.ttft_p50_ms], ["p95", "--warning", (row) => row.ttft_p95_ms]],
  },
  {
    title: "time between tokens",
    format: milliseconds,
    lines: [["p50", "--prefill", (row) => row.itl_p50_ms], ["p95", "--warning", (row) => row.itl_p95_ms]],
  },
  {
    title: "prefills per second, by where they ran",
    format: rate,
    lines: [
      ["remote", "--prefill", (row) => row["places.remote"]],
      ["local, cheaper", "--decode", (row) => row["places.local_cheaper"]],
      ["local, short", "--both", (row) => row["places.local_short"]],
      ["local, no choice", "--warning", (row) => FORCED.reduce((sum, name) => sum + (row[name] ?? 0), 0)],
    ],
  },
  {
    title: "cost of a hand-off (mean of 10 s)",
    format: milliseconds,
    lines: [
      ["whole", "--prefill", (row) => row.handoff_ms],
      ["until claimed, of those queued", "--warning", (row) => row.handoff_queue_ms],
      ["KV after the prefill", "--both", (row) => row.handoff_sending_ms],
    ],
  },
  {
    title: "prompt tokens per second, and where their KV was",
    format: rate,
    lines: [
      ["all", "--muted", (row) => row.prompt_tokens],
      ["cached", "--decode", (row) => row.cached_tokens],
      ["host", "--both", (row) => row["loaded_tokens.host"]],
      ["disk", "--warning", (row) => row["loaded_tokens.disk"]],
      ["other workers", "--prefill", (row) => row["loaded_tokens.peer"]],
    ],
  },
  {
    title: "requests in workers",
    format: rate,
    lines: [["running", "--decode", (row) => row.running], ["waiting", "--warning", (row) => row.waiting]],
  },
  {
    title: "KV in use",
    format: (value) => percent(value ?? 0, 1),
    top: 1,
    lines: [["in use", "--both", (row) => (row.kv_total ? row.kv_used / row.kv_total : null)]],
  },
  {
    title: "cores in use",
    format: rate,
    lines: [
      ["workers", "--decode", (row) => row.workers_cpu_s],
      ["frontends", "--warning", (row) => row.frontends_cpu_s],
    ],
  },
  {
    title: "memory (RSS)",
    format: (value) => bytes(value ?? 0),
    incrs: Array.from({ length: 24 }, (_, power) => 2 ** (power + 20)),
    lines: [
      ["workers", "--decode", (row) => row.workers_rss_bytes],
      ["frontends", "--warning", (row) => row.frontends_rss_bytes],
    ],
  },
];

export function charts(section, { get }) {
  const room = h("div", { class: "charts" });
  let span = SPANS[0];
  let hour = null;
  let nextMs = 0;
  const buttons = SPANS.map((name) => h("button", { "data-span": name, onclick: () => choose(name) }, name));
  section.append(h("nav", {}, ...buttons), room);
  choose(span);

  function choose(name) {
    span = name;
    for (const button of buttons) button.classList.toggle("chosen", button.dataset.span === name);
  }

  async function askHour() {
    if (performance.now() < nextMs) return;
    nextMs = performance.now() + HOUR_INTERVAL_MS;
    // Without an answer the last one stays.
    hour = await get("cluster?hour=1").then(({ history }) => rowsOf(history), () => hour);
  }

  /** Seconds at which a planner changed something. */
  let changes = [];
  let drawn = [];
  const redraw = () => {
    drawn.forEach(({ plot }) => plot.destroy());
    drawn = [];
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  function draw() {
    room.replaceChildren();
    drawn = CHARTS.map((chart) => {
      const figure = h("figure", {}, h("figcaption", {}, chart.title));
      room.append(figure);
      return { figure, chart, plot: makePlot(figure, chart, () => changes) };
    });
  }

  new ResizeObserver(() => {
    for (const { figure, plot } of drawn) plot.setSize({ width: figure.clientWidth, height: HEIGHT_PX });
  }).observe(room);

  return ({ snapshot, history }) => {
    if (!snapshot || history.size < 2) return false;
    section.hidden = false;
    if (!drawn.length) draw();
    if (span === "hour") askHour();
    changes = snapshot.planners.flatMap((planner) => planner.changes ?? []).map((change) => change.unix_s);
    const rows = (span === "hour" && hour) || history;
    const seconds = [...rows.keys()].sort((one, other) => one - other);
    for (const { chart, plot } of drawn) {
      const columns = chart.lines.map(([, , value]) => seconds.map((second) => value(rows.get(second))));
      plot.setData([seconds, ...columns]);
    }
    return true;
  };
}

/** For a legend: the value under the pointer, else the latest. */
function shown(format) {
  return (plot, value, series, index) => {
    const found = index === null ? plot.data[series].at(-1) : value;
    return found == null ? "–" : format(found);
  };
}

/** A dashed line at each of the moments. */
function drawMoments(plot, moments, stroke) {
  const { ctx, bbox } = plot;
  ctx.save();
  Object.assign(ctx, { strokeStyle: stroke, lineWidth: devicePixelRatio });
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const moment of moments) {
    const { min, max } = plot.scales.x;
    if (moment < min || moment > max) continue;
    const x = Math.round(plot.valToPos(moment, "x", true));
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function makePlot(figure, { lines, format, top, incrs }, moments) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
  const options = {
    width: figure.clientWidth,
    height: HEIGHT_PX,
    padding: [null, 25, null, null],
    hooks: { draw: [(plot) => drawMoments(plot, moments(), colour("--text"))] },
    cursor: { y: false, sync: { key: "kvrelay" } },
    scales: { y: { range: (plot, low, high) => [0, top ?? (Math.max(high ?? 0, 0) * 1.1 || 1)] } },
    axes: [
      { ...axis, space: 70, size: 26, incrs: [5, 15, 30, 60, 120, 300, 900, 1800], values: (plot, ticks) => ticks.map(clock) },
      { ...axis, size: 62, ...(incrs && { incrs }), values: (plot, ticks) => ticks.map(format) },
    ],
    series: [
      { label: "at", value: shown(clock) },
      ...lines.map(([label, name]) => ({
        label,
        stroke: colour(name),
        width: 1.5,
        points: { show: false },
        value: shown(format),
      })),
    ],
  };
  return new uPlot(options, [[], ...lines.map(() => [])], figure);
}
