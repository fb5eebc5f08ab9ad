"use strict";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const label = (impl) => (impl === "ours" ? "leasekit" : impl);

// An impl has the same colour in every chart: ours, the floor, then the peers.
function colour(store, impl) {
  if (impl === "ours") return css("--c0");
  if (impl === "floor") return css("--c1");
  const peers = [...new Set(report.results.filter((r) => r.store === store).map((r) => r.impl))]
    .filter((i) => i !== "ours" && i !== "floor");
  return css("--c" + (2 + (peers.indexOf(impl) % 3)));
}

function duration(ns) {
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["µs", 1e3]]) {
    if (ns >= size) return Number((ns / size).toPrecision(3)) + " " + unit;
  }
  return Math.round(ns) + " ns";
}

function rate(n) {
  return n >= 1e6 ? Number((n / 1e6).toPrecision(3)) + " M" : n >= 1e3 ? Number((n / 1e3).toPrecision(3)) + " k" : String(Math.round(n));
}

// On a logarithmic axis only the powers of ten are labelled.
const decades = (format) => function (value) {
  const exponent = Math.log10(value);
  return Math.abs(exponent - Math.round(exponent)) < 1e-9 ? format(value) : "";
};

const select = (store, workload) => report.results.filter((r) => r.store === store && r.workload === workload);
const impls = (results) => [...new Set(results.map((r) => r.impl))];

function common(extra) {
  const scale = { ticks: { color: css("--soft") }, grid: { color: css("--line") }, title: { display: true, color: css("--soft") } };
  const merge = (a, b) => {
    const out = { ...a };
    for (const k in b) out[k] = b[k] && typeof b[k] === "object" && !Array.isArray(b[k]) ? merge(a[k] || {}, b[k]) : b[k];
    return out;
  };
  return merge({
    animation: false, responsive: true, maintainAspectRatio: false,
    interaction: { mode: "nearest", axis: "x", intersect: false },
    plugins: { legend: { labels: { color: css("--fg"), boxWidth: 12, usePointStyle: true } } },
    scales: { x: scale, y: scale },
  }, extra);
}

// distribution: latency over percentiles, each decade of "nines" as wide as the
// one before, as in HDR plots.
function distribution(store) {
  const results = select(store, "acquire-release").filter((r) => r.contenders === 1);
  const nines = (p) => -Math.log10(1 - Math.min(p, 99.95) / 100);
  const shown = [50, 90, 99, 99.9];
  return {
    type: "line",
    data: {
      datasets: results.map((r) => ({
        label: label(r.impl), borderColor: colour(store, r.impl), backgroundColor: colour(store, r.impl),
        borderWidth: r.impl === "ours" ? 3 : 1.5, borderDash: r.impl === "floor" ? [5, 4] : [], pointRadius: 0, pointHitRadius: 8,
        data: percentiles.map((p, i) => ({ x: nines(p), y: r.distribution_ns[i], p })),
      })),
    },
    options: common({
      plugins: { tooltip: { callbacks: {
        title: (items) => items.length ? (items[0].raw.p === 100 ? "slowest" : items[0].raw.p + " % take at most") : "",
        label: (item) => item.dataset.label + ": " + duration(item.raw.y),
      } } },
      scales: {
        x: {
          type: "linear", min: 0, max: nines(99.95), title: { text: "percent of locks" },
          afterBuildTicks: (axis) => { axis.ticks = shown.map((p) => ({ value: nines(p) })); },
          ticks: { callback: (v) => Number((100 - 100 * Math.pow(10, -v)).toFixed(1)) + " %", maxRotation: 0, autoSkip: false },
        },
        y: { type: "logarithmic", title: { display: false }, ticks: { callback: decades(duration) } },
      },
    }),
  };
}

function scaling(store) {
  const results = select(store, "acquire-release");
  const clients = [...new Set(results.map((r) => r.contenders))].sort((a, b) => a - b);
  return {
    type: "line",
    data: {
      labels: clients,
      datasets: impls(results).map((impl) => ({
        label: label(impl), borderColor: colour(store, impl), backgroundColor: colour(store, impl),
        borderWidth: impl === "ours" ? 3 : 1.5, borderDash: impl === "floor" ? [5, 4] : [], pointRadius: 2.5,
        data: clients.map((n) => results.find((r) => r.impl === impl && r.contenders === n)?.ops_per_s ?? null),
      })),
    },
    options: common({
      plugins: { tooltip: { callbacks: { title: (items) => items[0].label + " clients", label: (item) => item.dataset.label + ": " + rate(item.raw) + " locks/s" } } },
      scales: { x: { title: { text: "clients" } }, y: { beginAtZero: true, title: { text: "locks per second" }, ticks: { callback: rate } } },
    }),
  };
}

// whiskers draws the 99th percentile above each bar.
const whiskers = {
  id: "whiskers",
  afterDatasetsDraw(chart) {
    const { ctx, scales: { y } } = chart;
    chart.data.datasets.forEach((set, i) => {
      if (!set.p99 || !chart.isDatasetVisible(i)) return;
      ctx.save();
      ctx.strokeStyle = css("--fg");
      ctx.lineWidth = 1.25;
      chart.getDatasetMeta(i).data.forEach((bar, j) => {
        if (set.p99[j] == null) return;
        const top = y.getPixelForValue(set.p99[j]);
        ctx.beginPath();
        ctx.moveTo(bar.x, bar.y); ctx.lineTo(bar.x, top);
        ctx.moveTo(bar.x - 4, top); ctx.lineTo(bar.x + 4, top);
        ctx.stroke();
      });
      ctx.restore();
    });
  },
};

function handover(store) {
  const results = select(store, "hand-over");
  const counts = [...new Set(results.map((r) => r.contenders))].sort((a, b) => a - b);
  const find = (impl, n) => results.find((r) => r.impl === impl && r.contenders === n && r.count > 0);
  const values = results.filter((r) => r.count > 0);
  return {
    type: "bar",
    data: {
      labels: counts,
      datasets: impls(results).map((impl) => ({
        label: label(impl), backgroundColor: colour(store, impl), maxBarThickness: 28,
        data: counts.map((n) => find(impl, n)?.p50_ns ?? null),
        p99: counts.map((n) => find(impl, n)?.p99_ns ?? null),
      })),
    },
    options: common({
      plugins: { tooltip: { callbacks: {
        title: (items) => items[0].label + " contenders",
        label: (item) => `${item.dataset.label}: ${duration(item.raw)}, 99 % ${duration(item.dataset.p99[item.dataIndex])}`,
      } } },
      scales: {
        x: { title: { text: "contenders" }, grid: { display: false } },
        y: {
          type: "logarithmic", title: { display: false }, ticks: { callback: decades(duration) },
          min: values.length ? Math.pow(10, Math.floor(Math.log10(Math.min(...values.map((r) => r.p50_ns)) / 2))) : 1,
          max: values.length ? Math.pow(10, Math.ceil(Math.log10(Math.max(...values.map((r) => r.p99_ns)) * 1.1))) : 10,
        },
      },
    }),
    plugins: [whiskers],
  };
}

function ratios() {
  const workloads = ["acquire-release", "held-try", "renew", "do", "hand-over"];
  const names = { "acquire-release": "lock and unlock", "held-try": "try on a held key", renew: "renew", do: "Do", "hand-over": "hand-over (2)" };
  const tones = ["--c0", "--c2", "--c3", "--c4", "--c1"];
  const value = (store, w) => report.results.find((r) => r.store === store && r.workload === w && r.impl === "ours" && r.contenders === (w === "hand-over" ? 2 : 1))?.ratio_to_floor || null;
  return {
    type: "bar",
    data: {
      labels: stores,
      datasets: workloads.map((w, i) => ({ label: names[w], backgroundColor: css(tones[i]), maxBarThickness: 30, data: stores.map((s) => value(s, w)) })),
    },
    options: common({
      plugins: { tooltip: { callbacks: { label: (item) => item.dataset.label + ": " + item.raw.toFixed(2) + "×" } } },
      scales: {
        x: { title: { display: false }, grid: { display: false } },
        y: { type: "logarithmic", min: 0.5, title: { text: "times the floor" }, ticks: { callback: (v) => ([0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].includes(v) ? v + "×" : "") } },
      },
    }),
  };
}

const makers = { distribution, scaling, handover };
let charts = [];

function draw() {
  charts.forEach((c) => c.destroy());
  Chart.defaults.font.family = getComputedStyle(document.body).fontFamily;
  charts = [new Chart(document.getElementById("ratios"), ratios())];
  for (const canvas of document.querySelectorAll("canvas[data-chart]")) {
    charts.push(new Chart(canvas, makers[canvas.dataset.chart](canvas.dataset.store)));
  }
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
// Print in the colours of paper, at the width of paper.
addEventListener("beforeprint", () => { draw(); charts.forEach((c) => c.resize()); });
addEventListener("afterprint", draw);
