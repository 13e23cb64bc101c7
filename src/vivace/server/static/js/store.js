// Storage that may be switched off or full. Preferences stay on this computer; the draft and the key stay in this tab.

function get(storage, name) {
  try {
    return globalThis[storage].getItem(`vivace.${name}`);
  } catch {
    return null;
  }
}

function set(storage, name, value) {
  try {
    if (value === null || value === "") globalThis[storage].removeItem(`vivace.${name}`);
    else globalThis[storage].setItem(`vivace.${name}`, value);
  } catch {
    // Nothing is lost but the memory of it.
  }
}

export const preferences = {
  get: (name) => get("localStorage", name),
  set: (name, value) => set("localStorage", name, value),
};

export const tab = {
  get: (name) => get("sessionStorage", name),
  set: (name, value) => set("sessionStorage", name, value),
};
