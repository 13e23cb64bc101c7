// Runs before the first paint: colours are right at once, and nothing shows in the wrong language.
(() => {
  let stored = null;
  try {
    stored = localStorage.getItem("vivace.theme");
  } catch {
    // Storage is switched off: the system's preference decides.
  }
  const dark = stored ? stored === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  document.documentElement.classList.add("starting");
})();
