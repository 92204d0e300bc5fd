// The parts of a page that need no server: theme, language, keyboard, and the values of controls.
(() => {
  "use strict";
  const root = document.documentElement;
  const cookie = (name) => document.cookie.match(new RegExp("(?:^|; )" + name + "=([a-z]+)"))?.[1];
  const remember = (name, value) => { document.cookie = name + "=" + value + "; Path=/; Max-Age=31536000; SameSite=Strict"; };
  const themes = ["system", "light", "dark"];
  const nameTheme = () => {
    for (const button of document.querySelectorAll("[data-action=theme]")) {
      const name = button.dataset[root.dataset.theme];
      if (button.textContent !== name) button.textContent = name;
    }
  };
  const applyTheme = (theme) => {
    root.dataset.theme = themes.includes(theme) ? theme : "system";
    nameTheme();
  };
  root.lang = document.querySelector("meta[name=trimaran-language]")?.content ?? "en";
  applyTheme(cookie("trimaran-theme"));
  if (location.hash.startsWith("#token=")) history.replaceState(null, "", location.pathname + location.search);

  const actions = {
    theme: () => {
      const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
      remember("trimaran-theme", next);
      applyTheme(next);
    },
    language: () => {
      remember("trimaran-language", root.lang === "zh" ? "en" : "zh");
      location.reload();
    },
    shortcuts: () => document.getElementById("shortcuts")?.showModal(),
    close: () => document.getElementById("shortcuts")?.close(),
  };
  document.addEventListener("click", (event) => {
    const action = event.target.closest?.("[data-action]")?.dataset.action;
    if (action in actions) actions[action]();
    else if (event.target.id === "shortcuts") actions.close(); // beside the dialog
  });
  const keys = { t: actions.theme, l: actions.language, "?": actions.shortcuts, "/": () => document.querySelector("input[type=search]")?.focus() };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea, [contenteditable]")) return;
    const link = document.querySelector('nav a[data-key="' + CSS.escape(event.key) + '"]');
    if (!link && !(event.key in keys)) return;
    event.preventDefault();
    link ? link.click() : keys[event.key]();
  });
  // NiceGUI sends plain values of an event, and not its target.
  for (const kind of ["input", "change", "keydown"]) {
    document.addEventListener(kind, (event) => { event.value = event.target.type === "checkbox" ? String(event.target.checked) : event.target.value; }, true);
  }
  document.addEventListener("click", (event) => { event.value = event.target.closest?.("[data-value]")?.dataset.value; }, true);
  // The header appears after this script has run.
  new MutationObserver(nameTheme).observe(root, { childList: true, subtree: true });
})();
